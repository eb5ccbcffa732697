"""The laboratory: experiments on one machine, without a broker; the algorithms, codecs and client loop of the fleet."""
