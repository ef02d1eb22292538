"""Transports, found by name. Every module here is a transport and defines ``open_transport(context)``."""
