"""The contracts and small parts that every room builds on."""
