"""What every package uses: checks of arguments, files, progress, statistics, text that is safe to print."""
