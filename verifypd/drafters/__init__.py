"""Drafters: what proposes tokens. Each writes its draft into the slots; none decides how long a draft is."""
