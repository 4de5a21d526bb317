"""The engine: one loop that absorbs verdicts, plans and launches, and the offline API on top of it."""
