"""`gpuenergyd run`: start of a training program that attaches to the daemon; needs the standard library only."""
