"""Facts about this machine: its network, its processors, its MPI library."""
