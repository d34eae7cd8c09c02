"""Mailboxes over point-to-point messages and over TCP."""
