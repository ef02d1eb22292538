"""The network foundation: gRPC for the control channel and the parameter server, and proofs of the job's token."""
