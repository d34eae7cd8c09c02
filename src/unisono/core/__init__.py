"""Interfaces and small components that all other packages use."""
