"""The control channel: rank 0 hosts a server, and every member of the job keeps one stream to it.

It serves every transport: joining and the version check, small values gathered over ranks, what ranks tell rank 0 and what it
announces, heartbeats, the first failure told to all, the end of the job, and the agreed step of a change of configuration.
``roster.py`` decides, without I/O; ``server.py`` and ``client.py`` move the messages of ``messages.py`` over gRPC, but those of
rank 0 itself, which is in the server's process (``direct_stream.py``).
"""
