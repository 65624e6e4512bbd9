"""Study `lineage`: which changes of a model the tests of kinship see through, and how often they are wrong."""
