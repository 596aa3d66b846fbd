"""Which request does what in the next step: pure Python, no clock, no engine, no threads."""
