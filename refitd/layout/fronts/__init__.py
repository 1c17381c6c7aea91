"""Front ends: what frameworks hold, as sides. One module for each family of frameworks."""
