"""KEDA's external scaler: how many requests of a model wait, for an autoscaler in Kubernetes."""
