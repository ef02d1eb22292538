"""One rank's membership in a job: its opening, its interface for plugins, and the end of its process."""
