"""What happens when: the SimPy model of arrivals and replicas."""
