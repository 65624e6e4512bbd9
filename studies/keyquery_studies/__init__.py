"""Published claims and our own, each re-run by one command: `keyquery study NAME`."""
