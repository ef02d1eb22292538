"""Results of the simulator (``commsched.simulator``) for the compared systems, as rows."""
