"""Transports, found by name. Every module here is a transport, and its ``BACKEND`` says how it opens."""
