"""The command line, the top floor: thin commands over the floors below."""
