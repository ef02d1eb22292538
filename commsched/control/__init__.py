"""The control channel, which serves every transport: rank 0 hosts a server, and every member of the job keeps one stream to it.

``roster.py`` makes the decisions, without I/O. ``server.py`` and ``client.py`` move the messages of ``messages.py`` over gRPC.
Rank 0's own messages need no gRPC, because rank 0 is in the server's process (``server.py``).
"""
