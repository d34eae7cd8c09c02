// Nanobind's own source, which it has in one file for builds without CMake.
#include "nb_combined.cpp"
