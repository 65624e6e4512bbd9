"""SeriesClassifier: time series to classes."""
