//! On what, with what and when something was measured.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use cuda::DeviceInfo;
use cuda::toolkit::Toolkit;
use flashcore::DType;
use serde::{Deserialize, Serialize};

/// Where numbers come from. Numbers of different provenance are not compared lightly.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Provenance {
    /// When the measurement began, in UTC.
    pub date: String,
    /// The command, as it was typed.
    pub command: String,
    /// The version of FlashCore and the commit it was built from.
    pub flashcore: String,
    /// The operating system and the processor's architecture.
    pub system: String,
    /// The GPU, if there is one.
    pub gpu: Option<GpuFound>,
    /// Clocks, power and heat before and after, as the driver tells them.
    pub conditions: Vec<Conditions>,
    /// Versions of everything that took part: compilers, libraries of peers.
    pub versions: Vec<(String, String)>,
}

/// A GPU and its driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuFound {
    /// The product's name.
    pub name: String,
    /// Its unique number.
    pub uuid: String,
    /// The CUDA version of the driver and its release.
    pub driver: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// The highest clock of the multiprocessors.
    pub clock_megahertz: f64,
    /// The second-level cache.
    pub l2_bytes: u64,
}

/// The state of a GPU at a moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Which moment.
    pub when: String,
    /// Name and value, as `nvidia-smi` writes them.
    pub values: Vec<(String, String)>,
}

/// What is asked about clocks, power and heat.
const ASKED: [&str; 7] = [
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
];

impl Provenance {
    /// What can be said without touching the GPU.
    pub fn of_this_process() -> Self {
        let mut versions = Vec::new();
        if let Ok(ptxas) = Toolkit::find().ptxas() {
            versions.push(("ptxas".to_owned(), ptxas.version.to_string()));
        }
        Provenance {
            date: date(SystemTime::now()),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            flashcore: format!(
                "{}, commit {}",
                env!("CARGO_PKG_VERSION"),
                env!("FLASHCORE_COMMIT")
            ),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            gpu: DeviceInfo::query(0).ok().map(|info| GpuFound::of(&info)),
            conditions: Vec::new(),
            versions,
        }
    }

    /// Notes the state of the GPU now, where `nvidia-smi` tells it.
    pub(crate) fn note_conditions(&mut self, when: &str) {
        self.conditions.extend(Conditions::now(when));
    }
}

impl GpuFound {
    /// What the driver says of a GPU.
    pub fn of(info: &DeviceInfo) -> Self {
        let release = info.driver.release.as_ref();
        let release = release.map_or_else(String::new, |release| format!(", release {release}"));
        GpuFound {
            name: info.name.clone(),
            uuid: info.uuid.to_string(),
            driver: format!("CUDA {}{release}", info.driver.version),
            multiprocessors: info.multiprocessors,
            clock_megahertz: f64::from(info.clock_kilohertz) / 1e3,
            l2_bytes: info.l2_bytes,
        }
    }

    /// What the tensor cores can do at the highest clock, in TFLOP/s, for queries of an element
    /// type: 4096 operations in each cycle of a Hopper multiprocessor with 16-bit elements, twice
    /// as many with 8-bit ones. Nothing above is believed.
    pub fn peak_tflops(&self, query: DType) -> f64 {
        let operations = if query.is_8_bit() { 8192.0 } else { 4096.0 };
        f64::from(self.multiprocessors) * operations * self.clock_megahertz / 1e6
    }

    /// The published bandwidth of its memory in GB/s, where it is a product known here.
    pub(crate) fn memory_bandwidth(&self) -> Option<f64> {
        let known = [("H200", 4800.0), ("H100 80GB HBM3", 3350.0), ("H100 PCIe", 2000.0)];
        known.into_iter().find(|(name, _)| self.name.contains(name)).map(|(_, speed)| speed)
    }
}

impl Conditions {
    fn now(when: &str) -> Option<Self> {
        let query = format!("--query-gpu={}", ASKED.join(","));
        let arguments = [&query, "--format=csv,noheader", "--id=0"];
        let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
        if !output.status.success() {
            return None;
        }
        let text = String::from_utf8_lossy(&output.stdout);
        let values = text.trim().split(',').map(|value| value.trim().to_owned());
        let values = ASKED.iter().map(|name| (*name).to_owned()).zip(values).collect();
        Some(Conditions { when: when.to_owned(), values })
    }
}

/// A moment as 2026-11-15 12:30:00 UTC.
pub fn date(moment: SystemTime) -> String {
    let seconds = moment.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years (Hinnant, "chrono-compatible date algorithms").
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let of = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(of(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(of(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(of(1_794_745_923), "2026-11-15 12:32:03 UTC");
    }
}
