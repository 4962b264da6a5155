"""Tables in CSV and Parquet files: of features, and of texts."""
