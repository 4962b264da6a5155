"""One exchange with a cohort: its groups run on a backend, and their replies are added up."""
