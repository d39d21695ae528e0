"""Files of requests in OpenAI's batch format: read, run one by one, and their results written."""
