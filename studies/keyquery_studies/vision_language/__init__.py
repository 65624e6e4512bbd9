"""Study `vision-language`."""
