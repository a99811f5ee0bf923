//! The product kernel: TMA, pipelines, wgmma, clusters.

use flashcore_testing::scene::Scene;
use kernels::Product;
use kernels::product::{Contiguous, Source};
use ptx::{Element, Swizzle};
use sim::{Mode, Policy};

use crate::{every_schedule, some_schedules};

/// Returns every combination of operand layouts and sources.
fn layouts() -> Vec<Product> {
    let mut all = Vec::new();
    for swizzle in Swizzle::ALL {
        for a in [Contiguous::Inner, Contiguous::Outer] {
            for b in [Contiguous::Inner, Contiguous::Outer] {
                for source in [Source::Shared, Source::Registers] {
                    for cluster in [1, 2] {
                        let (columns, stages) = (64, 2);
                        let changes = Product { swizzle, a, b, source, cluster, ..Product::PLAIN };
                        // Registers take rows as they lie.
                        if source == Source::Shared || a == Contiguous::Inner {
                            all.push(Product { columns, stages, ..changes });
                        }
                    }
                }
            }
        }
    }
    all
}

#[test]
fn every_layout_gives_the_product() {
    for configuration in layouts() {
        let scene = Scene::product(configuration, 100, 144).unwrap();
        some_schedules(&scene, Mode::Checked, &[(Policy::Random, 1), (Policy::Latest, 2)]);
    }
}

#[test]
fn every_width_gives_the_product() {
    for columns in (8..=256).step_by(8) {
        for element in [Element::F16, Element::BF16] {
            let configuration = Product { columns, element, stages: 2, ..Product::PLAIN };
            let scene = Scene::product(configuration, 64, 128).unwrap();
            some_schedules(&scene, Mode::Values, &[(Policy::Latest, 0)]);
        }
    }
}

/// The plain configuration, clusters, operands from registers, every swizzle.
#[test]
fn thirty_two_seeds_of_every_policy() {
    let narrow = Product { columns: 32, stages: 2, ..Product::PLAIN };
    let mut configurations = vec![
        Product::PLAIN,
        Product { cluster: 2, ..narrow },
        Product { source: Source::Registers, ..narrow },
        Product { source: Source::Registers, cluster: 2, element: Element::F16, ..narrow },
        Product { a: Contiguous::Outer, b: Contiguous::Outer, columns: 64, ..narrow },
    ];
    configurations.extend(Swizzle::ALL.map(|swizzle| Product { swizzle, ..narrow }));
    for configuration in configurations {
        let scene = Scene::product(configuration, 128, 256).unwrap();
        every_schedule(&scene, Mode::Values, 32);
    }
}

#[test]
fn no_alarm_under_any_schedule() {
    let narrow = Product { columns: 32, stages: 2, ..Product::PLAIN };
    for cluster in [1, 2] {
        for source in [Source::Shared, Source::Registers] {
            let configuration = Product { cluster, source, ..narrow };
            let scene = Scene::product(configuration, 128, 192).unwrap();
            every_schedule(&scene, Mode::Checked, 32);
        }
    }
}
