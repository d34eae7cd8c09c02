"""The commands: one file each, see `unisono.cli.command`."""
