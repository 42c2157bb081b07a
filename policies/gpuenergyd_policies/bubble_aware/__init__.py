"""The default policy: profiles each stage online, then slows down instructions off the critical path."""
