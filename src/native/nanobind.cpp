// Compiles nanobind's sources, which nanobind combines in one file for builds without CMake.
#include "nb_combined.cpp"
