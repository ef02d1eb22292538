"""What the simulator (``commsched.simulator``) says of the systems that are compared, as rows of results."""
