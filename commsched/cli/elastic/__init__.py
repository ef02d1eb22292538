"""``commsched run --elastic``: jobs that outlive the loss of ranks, servers and machines."""
