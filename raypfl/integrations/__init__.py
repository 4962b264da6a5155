"""What raypfl works with: MLflow, Ray Tune, Ray Jobs."""
