"""Commands: one file per command; see `unisono.tools.cli.Command`."""
