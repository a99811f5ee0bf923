//! Links between GPUs, and the time of transfers over them.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::Error;

/// A link from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// Bandwidth of one GPU in each direction, in GB/s.
    pub gigabytes_per_second: f64,
    /// Latency: microseconds until the first byte of a message arrives.
    pub latency_microseconds: f64,
}

/// Links by name, at four fifths of the published rate in one direction. Both numbers are
/// assumptions and were not measured here; measurements of a cluster by `nccl-tests` are better.
pub const NAMED: [(&str, Link); 6] = [
    ("nvlink4", Link { gigabytes_per_second: 360.0, latency_microseconds: 3.0 }),
    ("nvlink5", Link { gigabytes_per_second: 720.0, latency_microseconds: 3.0 }),
    ("pcie5", Link { gigabytes_per_second: 50.0, latency_microseconds: 5.0 }),
    ("hdr", Link { gigabytes_per_second: 20.0, latency_microseconds: 10.0 }),
    ("ndr", Link { gigabytes_per_second: 40.0, latency_microseconds: 10.0 }),
    ("xdr", Link { gigabytes_per_second: 80.0, latency_microseconds: 10.0 }),
];

impl FromStr for Link {
    type Err = Error;

    /// A name, or GB/s and microseconds: `400:3`.
    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some((_, link)) = NAMED.iter().find(|(name, _)| *name == text) {
            return Ok(*link);
        }
        let number = |text: &str| text.parse::<f64>().ok().filter(|it| it.is_finite());
        let given = text.split_once(':').map(|(speed, latency)| (number(speed), number(latency)));
        match given {
            Some((Some(speed), Some(latency))) if speed > 0.0 && latency >= 0.0 => {
                Ok(Link { gigabytes_per_second: speed, latency_microseconds: latency })
            }
            Some((Some(_), Some(_))) => Err(Error::Impossible(format!(
                "nothing goes over a link of `{text}`: GB/s must be above zero, and the latency not below"
            ))),
            _ => {
                let names = NAMED.map(|(name, _)| name).join(", ");
                Err(Error::Impossible(format!(
                    "`{text}` is no link: expected {names}, or GB/s and microseconds as in 400:3"
                )))
            }
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GB/s, {} us", self.gigabytes_per_second, self.latency_microseconds)
    }
}

/// GPUs in nodes, numbered node by node. Every GPU has its own link within the node, and its own
/// link to other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cluster {
    /// GPUs of a node.
    pub node: usize,
    /// Within a node.
    pub inside: Link,
    /// Between nodes.
    pub between: Link,
}

/// The number of peers that a rank exchanges messages with at a time: each such group pays the
/// latency once.
const CONCURRENT_MESSAGES: usize = 8;

/// The bytes and messages that a rank exchanges in one phase, within its node and with other nodes.
/// Links are full duplex, so that the larger of sending and receiving counts.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    inside: [u64; 2],
    between: [u64; 2],
}

impl Cluster {
    /// Checks that a node has GPUs.
    pub fn new(node: usize, inside: Link, between: Link) -> Result<Self, Error> {
        match node {
            0 => Err(Error::Impossible("a node has one GPU at least".to_owned())),
            _ => Ok(Cluster { node, inside, between }),
        }
    }

    /// Counts a message between two ranks.
    pub fn add(&self, traffic: &mut Traffic, [one, other]: [usize; 2], bytes: u64) {
        let same_node = one / self.node == other / self.node;
        let way = if same_node { &mut traffic.inside } else { &mut traffic.between };
        way[0] += bytes;
        way[1] += 1;
    }

    /// Milliseconds of messages that are sent concurrently.
    pub fn milliseconds(&self, traffic: &Traffic) -> f64 {
        let way = |link: Link, [bytes, messages]: [u64; 2]| {
            let waits = messages.div_ceil(CONCURRENT_MESSAGES as u64) as f64;
            waits * link.latency_microseconds / 1e3 + bytes as f64 / link.gigabytes_per_second / 1e6
        };
        way(self.inside, traffic.inside).max(way(self.between, traffic.between))
    }

    /// Milliseconds of a collective in which every rank gets, or gives a part of, so many bytes from all
    /// others together: as rings, in which bytes enter a node once, over the links of all its GPUs.
    pub(crate) fn collective(&self, ranks: usize, bytes: u64) -> f64 {
        if ranks < 2 {
            return 0.0;
        }
        let nodes = ranks.div_ceil(self.node);
        let within = ranks.min(self.node);
        let latency = (ranks - nodes) as f64 * self.inside.latency_microseconds
            + (nodes - 1) as f64 * self.between.latency_microseconds;
        let inside = bytes as f64 / self.inside.gigabytes_per_second;
        let from_others = bytes as f64 * (ranks - within) as f64 / (ranks - 1) as f64;
        let between = from_others / within as f64 / self.between.gigabytes_per_second;
        let inside = if within > 1 { inside } else { 0.0 };
        latency / 1e3 + inside.max(between) / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: Cluster = Cluster {
        node: 8,
        inside: Link { gigabytes_per_second: 400.0, latency_microseconds: 4.0 },
        between: Link { gigabytes_per_second: 50.0, latency_microseconds: 10.0 },
    };

    #[test]
    fn links_are_names_or_numbers() {
        let link = |text: &str| text.parse::<Link>().map_err(|error| error.to_string());
        assert_eq!(link("nvlink4").unwrap().gigabytes_per_second, 360.0);
        assert_eq!(link("400:3").unwrap().to_string(), "400 GB/s, 3 us");
        for wrong in ["0:3", "-1:3", "400:-1"] {
            let message = link(wrong).unwrap_err();
            assert!(message.contains("GB/s must be above zero"), "{message}");
        }
        for wrong in ["", "nan:3", "400:nan", "inf:1", "400", "nvlink3", "400:3:2"] {
            let message = link(wrong).unwrap_err();
            assert!(message.contains("is no link: expected nvlink4"), "{message}");
        }
        assert!(Cluster::new(0, CLUSTER.inside, CLUSTER.between).is_err());
    }

    #[test]
    fn messages_take_the_longer_way() {
        let mut traffic = Traffic::default();
        CLUSTER.add(&mut traffic, [0, 7], 400_000_000);
        assert!((CLUSTER.milliseconds(&traffic) - 1.004).abs() < 1e-9);
        // Eight times as slow, at the same time.
        CLUSTER.add(&mut traffic, [0, 8], 100_000_000);
        assert!((CLUSTER.milliseconds(&traffic) - 2.010).abs() < 1e-9);
        for other in 9..17 {
            CLUSTER.add(&mut traffic, [0, other], 0);
        }
        assert!((CLUSTER.milliseconds(&traffic) - 2.020).abs() < 1e-9);
        assert_eq!(CLUSTER.milliseconds(&Traffic::default()), 0.0);
    }

    #[test]
    fn collectives_enter_a_node_once() {
        assert_eq!(CLUSTER.collective(1, 1 << 30), 0.0);
        // One node: seven hops, and all over its own links.
        assert!((CLUSTER.collective(8, 400_000_000) - 1.028).abs() < 1e-9);
        // Two nodes: half of the bytes come from the other, an eighth of them over each link.
        let two = CLUSTER.collective(16, 15 * 50_000_000);
        assert!((two - (14.0 * 4.0 + 10.0) / 1e3 - 15.0 * 50.0 / 400.0).abs() < 1e-9, "{two}");
        // Nodes of one GPU have no other way.
        let alone = Cluster { node: 1, ..CLUSTER };
        assert!((alone.collective(2, 50_000_000) - 1.010).abs() < 1e-9);
    }
}
