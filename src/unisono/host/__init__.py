"""Facts about this machine: its network, processors and MPI library."""
