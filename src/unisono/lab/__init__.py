"""Simulates algorithms on network models, and replays them as animations. Communicators never use this package."""
