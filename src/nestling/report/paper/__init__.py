"""The paper written up: its tables, figures and claims, with our numbers beside its own. studies/paper/ has the rows."""
