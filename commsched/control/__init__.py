"""The control channel: rank 0 hosts a server, and every member of the job keeps one stream to it.

It serves every transport, and carries:

- joining, with the version check;
- small values gathered over all ranks, values sent to rank 0, and values that rank 0 announces;
- heartbeats, the first failure (sent to all members), and the end of the job;
- the agreed step of a change of configuration.

``roster.py`` makes the decisions, without I/O. ``server.py`` and ``client.py`` move the messages of ``messages.py`` over gRPC.
Rank 0's own messages need no gRPC, because rank 0 is in the server's process (``server.py``).
"""
