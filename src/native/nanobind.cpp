// Nanobind's sources, which it combines in one file for builds without CMake.
#include "nb_combined.cpp"
