"""Stand-ins for engines, devices and libraries."""
