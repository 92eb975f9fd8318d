"""The commands of `pagecast`: one module per command or family of commands."""
