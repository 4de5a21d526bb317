"""Watching from outside: records played back, servers in a terminal, several side by side. Runs no engine."""
