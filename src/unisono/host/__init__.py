"""Facts about this host: its network, processors and MPI library."""
