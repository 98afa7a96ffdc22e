"""The Mojo sources of the bandwidth loops: found through this package wherever it is installed."""
