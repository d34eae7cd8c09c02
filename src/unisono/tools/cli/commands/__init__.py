"""The commands: one file each, see `unisono.tools.cli.Command`."""
