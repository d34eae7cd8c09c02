"""Facts about this host: its network, its processors and its MPI library."""
