"""NPTClassifier and NPTRegressor: tables, by attention between rows."""
