"""Servers, clients, browsers and hostile sites."""
