"""What private updates cost: accuracy against epsilon, of the heart beats and of human activity, in simulation."""
