"""fit and predict. Each family of estimators has a folder; `kq.NAME` is the public name of each."""
