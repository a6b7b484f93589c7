"""The command line: one file per command, and main.py, which puts them together. `import lowbit` loads none of it."""
