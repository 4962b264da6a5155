"""MLflow: runs are recorded there as they go, or afterwards from their folders."""
